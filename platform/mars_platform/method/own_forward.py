"""Compares a model whose attention is replaced with transformers' own forward pass.

The engine attends over pages and training over packed rows, by functions that take the place of a
model's own attention. No field of a configuration says for sure whether a family bears that, so it
is tried when the model is loaded. Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.errors import UserError, one_line

PREFIX = 16
"""Leading tokens whose logits are judged apart from the others, which an engine computes behind
them."""
_NUM_TOKENS = 24
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference by the type of the logits, as a share of their spread. Rounding in dozens of
layers of bfloat16 gives some hundredths, and layers that compute something else a half or more."""
_REMEDY = "take a decoder of one of the families that docs/decoding.md lists"


@dataclass(frozen=True)
class OwnForward:
    """A few random tokens and the logits that a model's own forward pass gives behind each."""

    family: str
    tokens: list[int]
    logits: Tensor
    """float32 [tokens, vocabulary]."""

    @classmethod
    @torch.no_grad()
    def of(
        cls, model: PreTrainedModel, *, avoided: Collection[int] = (), most: int = _NUM_TOKENS
    ) -> OwnForward:
        """Run the model's own forward pass over random tokens, with the attention of its family's
        file.

        ``model`` is in the mode of inference; its attention is still its own, and stays "eager".
        There are at most ``most`` tokens, and ids in ``avoided``, such as the mask's, are left out.
        """
        drawn = torch.randint(
            model.config.get_text_config().vocab_size,
            (_NUM_TOKENS + 8 * len(avoided),),
            generator=torch.Generator().manual_seed(0),
        )
        tokens = [token for token in drawn.tolist() if token not in avoided]
        tokens = tokens[: min(most, _NUM_TOKENS)]
        model.set_attn_implementation("eager")
        ids = torch.tensor([tokens], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0]
        return cls(model.config.model_type, tokens, _comparable(logits))

    def check(self, way: str, compute: Callable[[], Tensor]) -> None:
        """Refuse the model if it gives other logits in another way.

        ``way`` names the other way, in which ``compute`` returns the logits, [tokens or fewer,
        vocabulary], behind the leading tokens. Half of the prefix, and half of the other tokens,
        have to agree: in a narrow type a mixture of experts may choose another expert for a few
        tokens.

        Raises:
            UserError: the message names the family and the difference.
        """
        try:
            found = compute()
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:  # a family's own code may raise anything
            raise self._refusal(
                f"its forward pass fails {way} ({type(error).__name__}: {one_line(error)})"
            ) from error
        expected = self.logits[: len(found)]
        spread = expected.norm(dim=-1).clamp(min=1e-9)
        errors = (_comparable(found) - expected).norm(dim=-1) / spread
        allowed = _TOLERANCES.get(found.dtype, 1e-3)
        for part in (errors[:PREFIX], errors[PREFIX:]):
            if len(part) and not part.median() <= allowed:
                first = int((~(errors <= allowed)).nonzero()[0])
                raise self._refusal(
                    f"its logits {way} differ from those of transformers by "
                    f"{float(part.median()):.1%} ({allowed:.1%} would be rounding), first behind "
                    f"token {first + 1} of {len(errors)}"
                )

    def _refusal(self, reason: str) -> UserError:
        return UserError(f"model: it is of the family {self.family!r}, and {reason}; {_REMEDY}")


def _comparable(logits: Tensor) -> Tensor:
    """Return logits around their mean, as float32 on the host; what is not finite counts 0.

    Some families give tokens that may not follow a logit near the end of the type's range.
    """
    finite = logits.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0).clamp(-1e3, 1e3)
    return finite - finite.mean(dim=-1, keepdim=True)
