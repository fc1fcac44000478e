"""Rules a request's allowed tokens and bad words impose: they limit what may follow its output."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mars_serve.engine.decoding_options import Sampling


class NoTokenLeft(Exception):
    """Raised when a request may choose no token any more."""


class TokenRules:
    """The tokens that may be chosen, by ``allowed_ids`` and ``bad_words`` of a request."""

    def __init__(self, sampling: Sampling, vocabulary: int) -> None:
        allowed, words = sampling.allowed_ids, sampling.bad_words
        self._always = torch.ones(vocabulary, dtype=torch.bool)
        if allowed is not None:
            bits = np.frombuffer(allowed, np.uint8)
            flags = np.unpackbits(bits, count=vocabulary, bitorder="little")
            self._always = torch.from_numpy(flags.view(np.bool_))
        self._always[[word[0] for word in words if len(word) == 1]] = False
        self._longer = defaultdict[int, list[tuple[int, ...]]](list)
        """Bad words of two tokens and more, by the last token but one."""
        for word in words:
            if len(word) > 1:
                self._longer[word[-2]].append(word)
        self.num_before = max(map(len, words), default=1) - 1
        """Number of tokens before a position on which its choice depends."""

    def allowed_after(self, output: Sequence[int]) -> Tensor:
        """Return the tokens that may follow an output: bool [vocabulary], not to be modified.

        The last ``num_before`` tokens of the output are enough.
        """
        last = tuple(output)
        words = self._longer.get(last[-1], ()) if last else ()
        complete = [word[-1] for word in words if last[1 - len(word) :] == word[:-1]]
        if not complete:
            return self._always
        allowed = self._always.clone()
        allowed[complete] = False
        return allowed

    def num_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Count the leading tokens that may follow an output, of which the end suffices."""
        before = list(output)
        for count, token in enumerate(tokens):
            if not self.allowed_after(before)[token]:
                return count
            before.append(token)
        return len(tokens)
