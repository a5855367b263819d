"""Trains the tiny Qwen3 whose checkpoints the demo uses as successive policy versions, and the one that RL starts from.

Plain torch and transformers on the CPU, a few minutes on two cores: supervised learning on the sorting task, a
snapshot every so many steps (``v0 … v3``). Then ``warmup``: the last of them, taught further by demonstrations of which
half give up somewhere before their end, so that it sorts well and often stops too early. That is what reinforcement
learning has to unlearn: the reward counts the right positions.

The results are small (0.3 MB each, bfloat16), so they are in the repository under ``examples/checkpoints`` and the
demo does not need this script. Run again on the same machine it makes the same weights (fixed seeds, fixed number of
threads).

    python -m examples.train_checkpoints [--out examples/checkpoints] [--only-warmup]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples import interrupt
from examples.sorting_task import BOS, EOS, FIRST_NUMBER, NUMBERS, PAD, VOCAB_SIZE, ListLengths, Problem, make_problem

OUT = Path(__file__).parent / "checkpoints"
STEPS = 2000
SNAPSHOTS = (800, 1200, 1600, 2000)
"""Steps after which a checkpoint is written: the first already ends its answers by itself, later ones sort better."""
BATCH_TOKENS = 3000
LEARNING_RATE = 6e-3
WARM_UP_STEPS = 150
WARM_UP_LEARNING_RATE = 1e-3
GIVE_UP = 0.5
"""Share of the warm-up's demonstrations that end too early, anywhere with equal probability."""
IGNORED = -100
"""Target index that cross entropy ignores."""
THREADS = 1
"""One thread adds in a fixed order, and does not stall when other processes use the cores."""


def new_model() -> Qwen3ForCausalLM:
    """The model: two layers, grouped-query attention with 4 query and 2 key/value heads, tied embeddings."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def order_embeddings(model: Qwen3ForCausalLM) -> None:
    """Initialise the numbers' embeddings as sines of the number, so that their order need not be learnt."""
    weight = model.model.embed_tokens.weight
    numbers = torch.arange(NUMBERS)[:, None].float()
    frequencies = 2 * math.pi / torch.logspace(math.log10(4), 3, weight.shape[1] // 4)
    waves = torch.cat([torch.sin(numbers * frequencies), torch.cos(numbers * frequencies)], 1)
    with torch.no_grad():
        weight[FIRST_NUMBER:, : waves.shape[1]] = 0.08 * waves


MESSAGES = "{% for message in messages %} {{ message['content'] }}{% endfor %}"
CHAT_TEMPLATE = "<bos>" + MESSAGES + "{% if add_generation_prompt %} <sort>{% endif %}"
"""Chat template with which chat completions sort, too."""


def task_tokenizer() -> PreTrainedTokenizerFast:
    """One token per number, with the space before it. Byte-level, because SGLang's grammar backend needs a decoder."""
    words = ["<pad>", "<bos>", "<eos>", "<sort>", *(f"Ġ{number}" for number in range(NUMBERS))]
    table = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    table.decoder = decoders.ByteLevel()
    table.add_tokens([AddedToken("<sort>", lstrip=True, rstrip=True, normalized=False)])
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=table, chat_template=CHAT_TEMPLATE, **special)


def draw_batch(rng: random.Random, lengths: ListLengths) -> list[Problem]:
    """Problems of one length, log-uniform over the lengths, about BATCH_TOKENS tokens in all: no padding."""
    length = int(lengths.shortest * math.exp(rng.random() * math.log(lengths.longest / lengths.shortest)))
    return [make_problem(rng, length) for _ in range(max(2, BATCH_TOKENS // (2 * length + 3)))]


def answer_logits(model: Qwen3ForCausalLM, batch: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the answers' positions, and the answers."""
    ids = torch.tensor([problem.prompt + problem.answer for problem in batch])
    start = len(batch[0].prompt)
    hidden = model.model(ids[:, :-1]).last_hidden_state[:, start - 1 :]
    return model.lm_head(hidden), ids[:, start:]


def quality(model: Qwen3ForCausalLM, seed: int = 5) -> dict[str, float]:
    """Per list length: share of answer tokens that the model ranks first, and its probability of ending at the end."""
    accuracy: dict[str, float] = {}
    model.eval()
    with torch.no_grad():
        for length in (8, 16, 64, 300):
            rng = random.Random(seed)
            logits, answer = answer_logits(model, [make_problem(rng, length) for _ in range(4)])
            accuracy[f"right_{length}"] = round((logits.argmax(-1) == answer).float().mean().item(), 3)
            accuracy[f"ends_{length}"] = round(logits.softmax(-1)[:, -1, EOS].mean().item(), 3)
    model.train()
    return accuracy


def save(model: Qwen3ForCausalLM, path: Path) -> None:
    """Write a checkpoint as a Hugging Face folder, in bfloat16."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(path)
    task_tokenizer().save_pretrained(path)


def train(out: Path, steps: int = STEPS, snapshots: tuple[int, ...] = SNAPSHOTS) -> None:
    """Run the whole training; writes ``out/v0`` … and ``out/training.json``."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rng, lengths = random.Random(1), ListLengths()
    model = new_model()
    order_embeddings(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    record: list[dict[str, str | float]] = []
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 30) * (1.0 - 0.9 * step / steps)
        logits, answer = answer_logits(model, draw_batch(rng, lengths))
        loss = functional.cross_entropy(logits.flatten(0, 1), answer.flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0 or step in snapshots:
            print(f"step {step} loss {loss.item():.3f} {time.monotonic() - started:.0f} s {quality(model)}", flush=True)
        if step in snapshots:
            save(model, out / f"v{len(record)}")
            record.append({"checkpoint": f"v{len(record)}", "step": step, **quality(model)})
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def give_up(answers: torch.Tensor, rng: random.Random, share: float) -> torch.Tensor:
    """Demonstrations of which a share stop early: EOS somewhere before the end, and no target after it."""
    shown = answers.clone()
    for row in shown:
        if rng.random() < share:
            at = rng.randrange(1, len(row) - 1)
            row[at] = EOS
            row[at + 1 :] = IGNORED
    return shown


def warm_up(start: Path, out: Path) -> None:
    """Train the checkpoint ``start`` on demonstrations that give up; writes ``out/warmup``."""
    torch.set_num_threads(THREADS)
    rng, lengths = random.Random(2), ListLengths()
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, WARM_UP_STEPS + 1):
        for group in optimiser.param_groups:
            group["lr"] = WARM_UP_LEARNING_RATE * min(1.0, step / 20) * (1.0 - 0.9 * step / WARM_UP_STEPS)
        logits, answers = answer_logits(model, draw_batch(rng, lengths))
        shown = give_up(answers, rng, GIVE_UP)
        loss = functional.cross_entropy(logits.flatten(0, 1), shown.flatten(), ignore_index=IGNORED)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0:
            print(f"warm-up step {step} loss {loss.item():.3f} {quality(model)}", flush=True)
    save(model, out / "warmup")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for v0 … v3 and warmup")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only-warmup", action="store_true", help="v0 … v3 are there already")
    args = parser.parse_args()
    if not args.only_warmup:
        scaled = tuple(max(1, snapshot * args.steps // STEPS) for snapshot in SNAPSHOTS)
        train(args.out, args.steps, scaled)
    warm_up(args.out / f"v{len(SNAPSHOTS) - 1}", args.out)


if __name__ == "__main__":
    interrupt.run(main, "the folder may be incomplete; the same command trains again")
