"""Which tokenizer a workload's text goes through: the model's own, or a byte-level BPE trained on the text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.data.text import Records, texts_of
from raybench.errors import RequestError
from raybench.models.sources import find
from raybench.suite.track import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINED_ON = 20_000
"""Most texts that a BPE is trained on."""
NUM_BYTES = 256
SPECIAL = ("<unk>", "<s>", "</s>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")


def tokenizer_source(workload: Workload) -> str | None:
    """The folder or hub name that the tokenizer is read from; None for a BPE that is trained on the text."""
    model, wanted = workload.model, workload.data.tokenizer
    if wanted == "auto":
        return model.source if model.weights in ("pretrained", "local") else None
    if wanted == "bpe":
        return None
    if wanted == "model":
        if model.source is None:
            raise RequestError(
                f"workload.data.tokenizer: {wanted!r} is not for {model.name!r}, which has none (allowed: auto, bpe, a "
                f"folder or a name on the hub)"
            )
        return model.source
    if "/" not in wanted and not Path(wanted).expanduser().is_dir():
        raise RequestError(
            f"workload.data.tokenizer: {wanted!r} is not known (allowed: auto, model, bpe, a folder or a hub's name)"
        )
    return wanted


def tokenizer_folder(workload: Workload) -> Path | None:
    """Where the tokenizer's files are; None for a BPE that is trained on the text.

    Raises:
        RequestError: there are none in its source.
    """
    source = tokenizer_source(workload)
    if source is None:
        return None
    folder, _ = find(source, "workload.data.tokenizer")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise RequestError(
            f"workload.data.tokenizer: {source} has no tokenizer (needed: one of {', '.join(TOKENIZER_FILES)}; or "
            f"workload.data.tokenizer=bpe for one trained on the text)"
        )
    return folder


def make_tokenizer(workload: Workload, records: Iterable[Records]) -> Any:
    """The workload's tokenizer, as transformers' class, all of whose ids are in the model's vocabulary.

    Raises:
        RequestError: it cannot be read, or does not fit the vocabulary.
    """
    from transformers import AutoTokenizer

    folder = tokenizer_folder(workload)
    if folder is None:
        return _trained(workload, records)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RequestError(f"workload.data.tokenizer: {folder} cannot be read ({str(error).splitlines()[0]})") from None
    largest, vocabulary = max(tokenizer.get_vocab().values()), workload.model.vocabulary_size
    if largest >= vocabulary:
        raise RequestError(
            f"workload.data.tokenizer: {tokenizer_source(workload)} has ids up to {largest}, and the model's "
            f"vocabulary is {vocabulary} (needed: a vocabulary_size of at least {largest + 1}, or its own tokenizer)"
        )
    return tokenizer


def _trained(workload: Workload, records: Iterable[Records]) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) of at most the model's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    model = workload.model
    special = list(SPECIAL)
    padding = int(model.options.get("pad_token_id", 0)) if model.family is not None else 0
    if padding >= len(special):
        raise RequestError(
            f"workload.data.tokenizer: a BPE trained on the text pads with one of the ids 0 to {len(special) - 1}, and "
            f"{model.name} with {padding} (allowed: its own tokenizer, or workload.model.options.pad_token_id=0)"
        )
    special[padding] = "<pad>"
    least = NUM_BYTES + len(special)
    if model.vocabulary_size < least:
        raise RequestError(
            f"workload.model.vocabulary_size: {model.vocabulary_size} is too small for a byte-level BPE (allowed: at "
            f"least {least})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.vocabulary_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(records, TRAINED_ON), trainer)
    begin, end = special[1], special[2]
    if model.family in ("bert", "distilbert"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}", special_tokens=[(begin, 1), (end, 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token=begin, eos_token=end)
