"""Prefix-affinity routing for megatron-core's data-parallel inference coordinator."""
