"""The live fault campaign: load, faults and what became of every request (`python tools/campaign`).

`account` counts, `command` reads flags, `run` goes through the phases; `fleet`, `replicas` and
`relay` are what is broken, `faults` breaks it, `load` and `clients` ask.
"""
