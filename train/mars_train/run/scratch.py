"""Creates a new model and tokenizer for demonstrations, tests and training from scratch."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)

from mars_platform.checkpoint.weights import save_checkpoint
from mars_platform.errors import UserError, one_line
from mars_train.recipe import ScratchModel

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ROW_MULTIPLE = 64
_TOKENIZER_TEXTS = 10_000


def create_model(
    scratch: ScratchModel, texts: Iterable[str], max_length: int, path: Path, seed: int
) -> None:
    """Train a tokenizer on ``texts``, build the model and save both as a checkpoint directory.

    The embedding is padded to a multiple of 64 rows with at least one spare row, as in published
    models, which a mask token can take later.
    """
    tokenizer = train_tokenizer(islice(texts, _TOKENIZER_TEXTS), scratch.vocabulary_size)
    rows = (len(tokenizer) // _ROW_MULTIPLE + 1) * _ROW_MULTIPLE
    settings = {"max_position_embeddings": 2 * max_length, **scratch.config}
    try:
        config = AutoConfig.for_model(
            **settings,
            vocab_size=rows,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        set_seed(seed)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"model.scratch.config: {one_line(error)}") from error
    save_checkpoint(path, model, tokenizer, metadata=None)


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with a ChatML template and one token per digit.

    With single digits a number has the same tokens wherever it occurs.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
