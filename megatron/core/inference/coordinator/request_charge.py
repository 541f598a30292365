"""What one more request costs a rank, for `added_delay`; learned from the prompts."""

SHARE = 0.22
"""Of the usual prompt. A request that decodes makes every step longer by the time to read its
context, for others, and theirs for it. With the profile of issue 6 (.03 us a token, and 66.7 us to
prefill one) and answers of 300 tokens that is up to 2 * 300 * .03 / 66.7 = .27. In replay .15 to
.25 do; less leaves ranks idle when few sessions are left, more has later first tokens."""

LEAST = 100
"""Tokens; also the charge before any prompt is known."""

_LATEST = 256
"""Prompts of which about the usual one is the mean."""

_LONGEST, _FIRST_LONGEST, _MOST = 4, 100_000, 2**30
"""Times the usual one that a prompt counts at most, tokens while there is none, and tokens in any
case: what clients say of lengths is not checked."""

_STEP = 1 / 8
"""The charge changes by no less than this share, since all ranks are ordered anew then."""


class RequestCharge:
    """The charge, and the mean length of the latest prompts.

    Attributes:
        tokens: The charge, in tokens of prefill.
    """

    def __init__(self):
        self.tokens = LEAST
        self._usual = 0.0
        self._seen = 0

    def learn(self, prompt_tokens: int) -> bool:
        """A prompt has come; returns whether the charge is another one now."""
        if prompt_tokens <= 0:
            return False
        self._seen = min(self._seen + 1, _LATEST)
        counted = min(prompt_tokens, _LONGEST * self._usual or _FIRST_LONGEST, _MOST)
        self._usual += (counted - self._usual) / self._seen
        charge = max(LEAST, int(SHARE * self._usual))
        if abs(charge - self.tokens) < _STEP * self.tokens:
            return False
        self.tokens = charge
        return True
