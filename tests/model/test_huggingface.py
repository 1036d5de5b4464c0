"""Hugging Face models in parts compute what transformers computes, and come from where the row says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from raybench.errors import RequestError
from raybench.models import families, sources
from raybench.models.build import build_model, make_loss_sum, materialize, outline
from raybench.models.flops import flops_per_token, num_parameters
from raybench.models.sources import UnreachableError, resolve
from raybench.suite.track import DataConfig, ModelConfig, Workload
from tests.hub import CLASSIFIER, DISTILBERT, FAMILIES, LLAMA, classified, minilm_folder, padded, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A small Llama and a small DistilBERT that classify, as folders."""
    root = tmp_path_factory.mktemp("saved")
    save(CLASSIFIER, root / "llama")
    save(DISTILBERT, root / "distilbert")
    return root


@pytest.mark.parametrize(("name", "expected"), [("smollm2-360m", 361_825_920), ("distilbert", 66_957_317)])
def test_the_published_models_have_the_published_number_of_parameters(name, expected):
    work = Workload(model=ModelConfig(name=name), data=DataConfig(name="reviews"))
    assert num_parameters(work) == expected
    model = outline(work, 1)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_alone_tell_the_number_of_parameters_and_products(name):
    work = classified(FAMILIES[name])
    model = outline(work, 1)
    assert num_parameters(work) == sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks."))
    head = sum(p.numel() for n, p in model.head.named_parameters() if p.dim() == 2) if "llama" in name else 0
    assert families.matrix_parameters(work.model) == matrices + head
    assert flops_per_token(work)["6n"] == 6 * (matrices + head)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_parts_it_is_the_untouched_model(name, recompute):
    """Outputs, loss and every gradient, with a padded sequence among others."""
    work = classified(FAMILIES[name], recompute=recompute)
    inputs, labels = padded(work.model)
    losses, gradients = [], []
    for untouched in (False, True):
        model = materialize(outline(work, work.seed, untouched=untouched), work, CPU, work.seed)
        loss = make_loss_sum(model, "fp32")(model, inputs, labels)
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert gradients[0].keys() == gradients[1].keys()
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][parameter], rtol=1e-5, atol=1e-6)


def test_padding_does_not_change_what_a_sequence_scores():
    for model in (CLASSIFIER, DISTILBERT):
        work = classified(model)
        built = build_model(work, CPU, 1).eval()
        inputs, _ = padded(work.model)
        alone = {name: value[1:2, :9] for name, value in inputs.items()}
        place = 8 if model.family == "llama" else 0
        torch.testing.assert_close(built(**inputs)[1, place], built(**alone)[0, place], rtol=1e-5, atol=1e-5)


def test_random_values_follow_from_seed_and_name():
    work = classified(LLAMA)
    one, same, other = (dict(build_model(work, CPU, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    embedding = "embedding.tokens.weight"
    assert not torch.equal(one[embedding], other[embedding])
    assert one[embedding].std().item() == pytest.approx(0.02, rel=0.1)
    assert not one[embedding][0].any()  # the padding's row
    assert "head.scores.weight" not in one  # tied


def test_bf16_stays_near_fp32():
    work = classified(DISTILBERT)
    model = build_model(work, CPU, 1)
    inputs, labels = padded(work.model)
    exact, near = (make_loss_sum(model, p)(model, inputs, labels).item() for p in ("fp32", "bf16"))
    assert near == pytest.approx(exact, rel=2e-2)
    assert near != exact


@pytest.mark.parametrize("name", ["llama", "distilbert"])
def test_a_folder_gives_its_own_values(saved, name):
    model = resolve(ModelConfig(name=str(saved / name)))
    assert (model.weights, model.family, model.width, model.num_layers) == ("local", name, 24, 3)
    work = classified(model)
    ours = build_model(work, CPU, work.seed).eval()
    theirs = AutoModelForSequenceClassification.from_pretrained(saved / name).eval()
    inputs, labels = padded(work.model)
    outputs = ours(**inputs)
    picked = outputs[labels != -100] if name == "llama" else outputs[:, 0]
    torch.testing.assert_close(picked, theirs(**inputs).logits, rtol=1e-5, atol=1e-5)
    other = build_model(work, CPU, work.seed + 1)
    assert not torch.equal(next(other.parameters()), next(ours.parameters()))  # whoever forgets to broadcast is found


def test_the_trained_minilm_is_read_with_a_new_head():
    model = resolve(ModelConfig(name=str(minilm_folder())))
    assert (model.weights, model.family, model.num_layers, model.width) == ("local", "bert", 6, 384)
    work = classified(model, sequence_length=16)
    ours = build_model(work, CPU, work.seed).eval()
    theirs = AutoModel.from_pretrained(minilm_folder()).eval()
    inputs, _ = padded(work.model)
    hidden = ours.embedding(**inputs)
    for block in ours.blocks:
        hidden = block(hidden, **ours.block_inputs(inputs))
    torch.testing.assert_close(hidden, theirs(**inputs).last_hidden_state, rtol=1e-5, atol=1e-5)
    again = dict(build_model(work, CPU, work.seed).named_parameters())["head.classifier.weight"]
    assert torch.equal(again, dict(ours.named_parameters())["head.classifier.weight"])
    assert again.std() > 0


def test_fewer_layers_of_a_source_are_its_first(saved):
    model = resolve(ModelConfig(name=str(saved / "distilbert")))
    work = classified(model.model_copy(update={"num_layers": 1}))
    few = dict(build_model(work, CPU, work.seed).named_parameters())
    all_of_them = dict(build_model(classified(model), CPU, work.seed).named_parameters())
    assert len(few) < len(all_of_them)
    assert all(torch.equal(value, all_of_them[name]) for name, value in few.items())


@pytest.fixture
def no_network(monkeypatch):
    """A hub at an address where nobody listens."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    sources.hub_answers.cache_clear()
    yield
    sources.hub_answers.cache_clear()


def test_without_a_network_the_carried_configurations_have_random_weights(no_network):
    assert resolve(ModelConfig(name="smollm2-360m")).weights == "random"
    assert resolve(ModelConfig(name="distilbert", num_layers=2)).weights == "random"


@pytest.mark.timeout(60)  # no retries
def test_a_hub_name_without_a_network_is_one_message_with_three_ways_on(no_network):
    with pytest.raises(UnreachableError) as caught:
        resolve(ModelConfig(name="nobody/model"))
    text = str(caught.value)
    for part in (
        "workload.model.name: 'nobody/model'",
        "HF_ENDPOINT",
        "copy its folder",
        "smollm2-360m",
        "127.0.0.1:9",
    ):
        assert part in text
    with pytest.raises(UnreachableError):
        resolve(ModelConfig(name="distilbert", weights="pretrained"))


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _of_another_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_without_weights, "has no weights (needed: one of model.safetensors"),
        (_of_another_family, "of the family 't5', which is not known (allowed: llama, bert, distilbert)"),
        (_without_config, "is no model's folder"),
        (_broken_config, "config.json cannot be read"),
    ],
)
def test_a_wrong_folder_is_refused_in_words(saved, tmp_path, break_it, said):
    folder = shutil.copytree(saved / "distilbert", tmp_path / "wrong")
    break_it(folder)
    with pytest.raises(RequestError, match=r"^workload\.model\.name: ") as caught:
        resolve(ModelConfig(name=str(folder)))
    assert said in str(caught.value)


def test_the_configuration_of_a_folder_without_weights_can_be_used(saved, tmp_path):
    folder = shutil.copytree(saved / "distilbert", tmp_path / "wrong")
    _without_weights(folder)
    model = resolve(ModelConfig(name=str(folder), weights="random"))
    assert (model.weights, model.width) == ("random", 24)


def test_weights_that_are_not_the_configurations_are_refused(saved, tmp_path):
    folder = shutil.copytree(saved / "distilbert", tmp_path / "wrong")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_layers": 4}))
    work = classified(resolve(ModelConfig(name=str(folder))))
    with pytest.raises(RequestError, match="does not hold 16 of the parameters of its configuration"):
        build_model(work, CPU, work.seed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "smollm"}, "did you mean 'smollm2-360m'"),
        ({"name": "./nowhere"}, "there is no such folder"),
        ({"name": "llama", "weights": "pretrained"}, "weights: 'pretrained' is not for 'llama'"),
        ({"name": "smollm2-360m", "width": 480, "weights": "pretrained"}, "needs the sizes of HuggingFaceTB/SmolLM2"),
        ({"name": "distilbert", "task": "language-modelling"}, "not for the distilbert family"),
        ({"name": "llama", "num_heads": 7}, "num_heads: 7 does not divide width 768"),
        ({"name": "llama", "num_kv_heads": 5}, "num_kv_heads: 5 does not divide num_heads 12"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(given, said):
    with pytest.raises((RequestError, ValueError)) as caught:
        resolve(ModelConfig(**given))
    assert said in str(caught.value)


def test_a_classifier_needs_labels():
    with pytest.raises(ValueError, match=r"data\.name: 'synthetic' has no labels"):
        Workload(model=ModelConfig(name="distilbert"))
