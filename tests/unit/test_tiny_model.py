"""The tiny models: complete Hugging Face folders that transformers loads without a missing or an extra weight."""

import json
from pathlib import Path

import numpy as np
import pytest

from examples import tiny_model
from examples.sorting_task import BOS, EOS, FIRST_NUMBER, SORT

CHECKPOINTS = Path(tiny_model.__file__).parent / "checkpoints"


@pytest.mark.parametrize("family", tiny_model.FAMILIES)
@pytest.mark.parametrize("dtype", tiny_model.DTYPES)
def test_transformers_loads_every_weight(tmp_path: Path, family: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = tiny_model.make(tmp_path / "model", family, dtype, seed=1)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.dtype == getattr(torch, dtype)
    actual = tiny_model.weights(family, seed=1)
    for name, weight in model.named_parameters():
        expected = torch.from_numpy(actual[name]).to(weight.dtype)
        assert torch.equal(weight, expected), name


def test_next_tokens_are_varied_at_temperature_1(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model.make(tmp_path), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(10, 42)[None]).logits[0]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.min() > 4.0  # of at most 6.2 for 512 tokens
    assert len(set(logits.argmax(-1).tolist())) > 8  # and greedy answers differ by position too


def test_same_seed_same_files_and_other_seed_other_weights(tmp_path: Path) -> None:
    one, two = tiny_model.make(tmp_path / "one", seed=5), tiny_model.make(tmp_path / "two", seed=5)
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
    three = tiny_model.make(tmp_path / "three", seed=6)
    assert (one / "model.safetensors").read_bytes() != (three / "model.safetensors").read_bytes()


def test_norms_differ_from_one() -> None:
    norms = [array for name, array in tiny_model.weights("qwen3").items() if "norm" in name]
    assert norms
    assert all(np.abs(array - 1).max() > 0.05 for array in norms)


def test_tokenizer_round_trips_any_text_and_has_a_chat_template(tmp_path: Path) -> None:
    tokenizer = tiny_model.tokenizer()
    for text in ("the quick brown fox", "größer → 漢字 🙂", "\x00\t\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() <= tiny_model.VOCAB_SIZE
    specials = [tokenizer.token_to_id(token) for token in tiny_model.SPECIAL_TOKENS]
    assert specials == list(range(len(specials)))
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tiny_model.make(tmp_path))
    chat = [{"role": "user", "content": "hello"}]
    text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><|user|>hello<eos><|assistant|>"
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family"):
        tiny_model.make(tmp_path / "model", family="gpt")
    with pytest.raises(ValueError, match="dtype"):
        tiny_model.make(tmp_path / "model", dtype="float16")
    assert not (tmp_path / "model").exists()
    assert json.loads((tiny_model.make(tmp_path / "model") / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize("name", ["v0", "v3", "warmup"])
def test_tokenizer_of_a_shipped_checkpoint_encodes_prompts_and_serves_a_grammar_backend(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from_tokenizer = pytest.importorskip("llguidance.hf").from_tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / name)
    ids = tokenizer("<bos> 17 4 9 <sort> 4 9 17<eos>").input_ids
    prompt, answer = ([FIRST_NUMBER + number for number in numbers] for numbers in ((17, 4, 9), (4, 9, 17)))
    assert ids == [BOS, *prompt, SORT, *answer, EOS]
    assert tokenizer.decode(ids[5:8]) == " 4 9 17"
    from_tokenizer(tokenizer)  # raises for a tokenizer without a known decoder
