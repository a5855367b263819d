"""A minimal trainer: GRPO in plain torch over HTTP. The reward is the share of even token ids.

python -m sglang_april.launch_server --model-path MODEL --april-quota 4 --disable-overlap-schedule
python -m examples.own_trainer http://127.0.0.1:30000 MODEL --steps 3
"""

import argparse
import tempfile

import httpx
import torch
from transformers import AutoModelForCausalLM


def post(url: str, body: dict) -> dict:
    answer = httpx.post(url, json=body, timeout=None)
    if answer.is_error:
        raise SystemExit(f"{url}: {answer.text}")
    return answer.json()


def train(url: str, model_path: str, steps: int, quota: int = 4, n: int = 4) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    params, means, carried = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}, [], 0
    run, folder = f"own-{torch.seed()}", tempfile.mkdtemp()
    for step in range(steps):
        new = range(2 * quota - carried)  # keep twice the quota in the engine; a group starts when a slot is free
        prompts = [{"id": f"{step}-{i}", "input_ids": [5 + i, 6, 7], "n": n} for i in new]
        body = {"run": run, "prompts": prompts, "quota": quota, "sampling_params": params}
        reply = post(f"{url}/april/rollout", body)
        carried = reply["carried"]["groups"]
        losses, rewards = [], []
        for group in reply["finished"]:
            outputs = [torch.tensor(sample["output_ids"]) for sample in group["samples"]]
            scores = torch.stack([(ids % 2 == 0).float().mean() for ids in outputs])
            for sample, ids, advantage in zip(group["samples"], outputs, scores - scores.mean(), strict=True):
                tokens = torch.cat([torch.tensor(group["prompt_ids"]), ids])
                logits = model(tokens[None, :-1]).logits[0, -len(ids) :]
                logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
                ratio = (logprobs - torch.tensor(sample["logprobs"])).exp()  # behaviour policy of each token
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).mean())
            rewards.append(scores.mean().item())
        optimiser.zero_grad()
        torch.stack(losses).mean().backward()
        optimiser.step()
        model.save_pretrained(folder)
        post(f"{url}/april/push/begin", {})
        post(f"{url}/update_weights_from_disk", {"model_path": folder, "flush_cache": False})
        version = post(f"{url}/april/push/end", {})["policy_version"]
        means.append(sum(rewards) / len(rewards))
        print(f"step {step}: reward {means[-1]:.3f}, {carried} groups carried, policy version now {version}")
    post(f"{url}/april/drop", {"run": run})
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url"), parser.add_argument("model_path"), parser.add_argument("--steps", type=int, default=3)
    train(**vars(parser.parse_args()))
