"""The garbage collector of the coordinator process: no pause that grows with what is remembered.

The coordinator keeps millions of objects for hours: to look through a million takes CPython's
collector 50 to 100 ms, in which no request is routed. It would do so in vain. What is forgotten
here is freed by its reference count, since nothing on a request's way forms a cycle (a test counts
them); cycles come from rare events and from tokenizers, and are young when they die.

So only the young are looked through, some thousand objects at a time, which takes half a ms:

- CPython up to 3.13, and newer ones that went back to it, has three generations. The youngest is
  looked through after 700 or 2,000 net allocations, every 12th time the second with it, and every
  12th time of these all of them, if what has come since the last full collection is more than a
  quarter of what survived it. `spare_the_old` has the second take its turn every fourth time, since
  that takes no longer altogether and each pause is a third, and the third never.
- CPython 3.14 looks through a part of the old objects with each collection of the young ones, and
  with each of these through all that can be reached from it, which may be the whole index. Nothing
  switches that off but having few old objects: `freeze` moves them where no collection looks.

The price: a cycle that has lived through a collection and a tick is never freed.
"""

import gc

_SOON, _NEVER = 2, 2**31 - 1
"""How often a generation is to have been looked through before the next older one is with it."""


def spare_the_old() -> None:
    """Set the collector up. Call it once, when all that is to stay has been imported."""
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _SOON, _NEVER)


def freeze() -> None:
    """Take what is left of the last second out of every further collection.

    The youngest, at most a few thousand, are looked through before. Freezing itself takes no time
    up to CPython 3.13, and in 3.14 some nanoseconds for each new object.
    """
    gc.collect(0)
    gc.freeze()
