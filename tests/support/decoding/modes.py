"""Options of the decoding modes, for tests that compare the modes."""

from __future__ import annotations

from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes

MAX_TOKENS = 26
AR = DecodingOptions(MAX_TOKENS, Mode.AR)
EXACT = [
    DecodingOptions(MAX_TOKENS, Mode.EXACT),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.ALL),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.LAST),
    DecodingOptions(MAX_TOKENS, Mode.EXACT, outcomes=Outcomes.ALL, window=2),
]
THRESHOLD = DecodingOptions(MAX_TOKENS, threshold=0.6, window=4)
