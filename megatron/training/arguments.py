"""Command-line flags of prefix-affinity routing, as an extra_args_provider."""
