"""Attacks on a coordinator's socket, and the traffic beside them that must be unharmed.

`mutations` damages messages, `peer` knows what a fuzzing peer says, `live` has many of them talk to
a real process, `garbage` does without any protocol, `offline` drives the core without a socket;
`beside` is the valid traffic, `target` the process under attack, `crowd` only connects.
"""
