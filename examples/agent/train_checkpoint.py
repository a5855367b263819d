"""Trains the tiny Qwen3 that the agent example starts from: ``examples/checkpoints/calculator``.

Plain torch and transformers on one CPU thread, a few minutes: supervised learning on demonstrations of the calculator
task, and then on demonstrations that give up: before each further number, a quarter of them answer the sum so far. So
the model uses its tool well and often answers too early, which reinforcement learning unlearns. Run again on the same
machine it makes the same weights.

    python -m examples.agent.train_checkpoint [--out examples/checkpoints/calculator]
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples import interrupt
from examples.agent.calculator import LARGEST_SUM, draw_numbers
from examples.sorting_task import BOS, EOS, VOCAB_SIZE
from examples.train_checkpoints import IGNORED, OUT, THREADS, new_model

WORDS = ("add", "answer", "error", "user", "assistant", "tool")
TOKENS = ["<pad>", "<bos>", "<eos>", *(f"Ġ{word}" for word in WORDS)]
FIRST_NUMBER = len(TOKENS)
ADD, ANSWER, _, USER, ASSISTANT, TOOL = range(3, FIRST_NUMBER)
STEPS = 1200
GIVE_UP_STEPS = 150
BATCH = 96
LEARNING_RATE = 4e-3
GIVE_UP_LEARNING_RATE = 1e-3
GIVE_UP = 0.25
"""Share of the decisions at which a demonstration of the second part answers too early."""
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %} {{ message['role'] }} {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)
"""Chat template: text that the model drew converts back to the same ids, because each word is one token."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and number, with the space before it."""
    words = [*TOKENS, *(f"Ġ{number}" for number in range(VOCAB_SIZE - FIRST_NUMBER))]
    table = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    table.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=table, chat_template=CHAT_TEMPLATE, **special)


def number(value: int) -> int:
    """The token of a number."""
    return FIRST_NUMBER + value


def demonstration(numbers: list[int], rng: random.Random, give_up: float) -> tuple[list[int], list[bool]]:
    """The token ids of a conversation, and which of them the model draws."""
    ids, drawn = [BOS, USER, *map(number, numbers)], [False] * (2 + len(numbers))
    total = numbers[0]

    def turn(*words: int) -> None:
        ids.extend((ASSISTANT, *words, EOS))
        drawn.extend((False, *(True for _ in words), True))

    for value in numbers[1:]:
        if rng.random() < give_up:
            break
        turn(ADD, number(total), number(value))
        total += value
        ids.extend((TOOL, number(total)))
        drawn.extend((False, False))
    turn(ANSWER, number(total))
    return ids, drawn


def draw_batch(rng: random.Random, give_up: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded conversations, int64 [BATCH, length], and their targets, IGNORED where the model draws no token."""
    shown = [demonstration(draw_numbers(rng), rng, give_up) for _ in range(BATCH)]
    length = max(len(ids) for ids, _ in shown)
    inputs, targets = torch.zeros(BATCH, length, dtype=torch.int64), torch.full((BATCH, length), IGNORED)
    for row, (ids, drawn) in enumerate(shown):
        tokens = torch.tensor(ids)
        inputs[row, : len(ids)] = tokens
        targets[row, : len(ids)] = torch.where(torch.tensor(drawn), tokens, IGNORED)
    return inputs, targets


def learn(model: Qwen3ForCausalLM, steps: int, learning_rate: float, give_up: float, seed: int) -> None:
    """Supervised learning on demonstrations."""
    rng = random.Random(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * min(1.0, step / 50) * (1.0 - 0.95 * step / steps)
        inputs, targets = draw_batch(rng, give_up)
        logits = model(inputs[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT / "calculator", help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    assert number(LARGEST_SUM) < VOCAB_SIZE
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = new_model()
    learn(model, args.steps, LEARNING_RATE, 0.0, seed=1)
    learn(model, GIVE_UP_STEPS, GIVE_UP_LEARNING_RATE, GIVE_UP, seed=2)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer().save_pretrained(args.out)


if __name__ == "__main__":
    interrupt.run(main, "nothing was written; the same command trains again")
