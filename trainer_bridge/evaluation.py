"""Evaluation on held-out prompts, as a separate run at the engine (`<run>/eval`)."""

from concurrent.futures import Future

import numpy as np

from sglang_april.client import AprilClient
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.types import RolloutGroup
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.rewards import Rewards, RewardSample, Score
from trainer_bridge.sampling import evaluation_params


def evaluation_round_id(run: str, step: int) -> str:
    """The id of the evaluation after a step."""
    return f"{run}.eval-{step}"


def evaluate(
    client: AprilClient | EnginePool, run: str, step: int, data: PromptData, rewards: Rewards, config: Config
) -> dict[str, float]:
    """Mean reward over all held-out prompts, its standard error over prompts, and response lengths.

    Samples without a reward are excluded and counted. The reply is kept until it is acknowledged, because a trainer
    that restarts from a checkpoint repeats all evaluations since then. Evaluations do not affect training samples:
    their noise depends on prompt ids only (`seed-independence`).
    """
    data.position = 0
    prompts = {prompt.id: prompt for prompt in data.take(len(data))}
    scores: list[Future[list[Score]]] = []
    lengths: list[int] = []
    for event in client.stream(
        run=f"{run}/eval",
        round_id=evaluation_round_id(run, step),
        prompts=[prompt.body(config.n_samples_per_eval_prompt) for prompt in prompts.values()],
        sampling_params=evaluation_params(config),
        quota=None,
        quota_unit="group",
        keep_until_ack=True,
        previews=True,
    ):
        if isinstance(event, RolloutGroup):
            samples = [RewardSample(s.text, s.output_ids.tolist(), s.finish_reason, s.index) for s in event.samples]
            scores.append(rewards.submit(samples, prompts[event.id]))
            lengths += [len(sample.output_ids) for sample in event.samples]
    return evaluation_metrics([future.result() for future in scores], lengths)


def evaluation_metrics(scores: list[list[Score]], lengths: list[int]) -> dict[str, float]:
    """The metrics of one evaluation.

    Args:
        scores: one list for each prompt, with a score for each of its samples.
        lengths: tokens that the model drew, one for each sample.
    """
    rewards = [[score.reward for score in group if score.reward is not None] for group in scores]
    means = np.array([np.mean(group) for group in rewards if group])
    return {
        "reward": float(means.mean()) if len(means) else float("nan"),
        "reward_se": float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan"),
        "prompts": len(means),
        "unscored": sum(len(group) for group in scores) - sum(map(len, rewards)),
        "length_mean": float(np.mean(lengths)) if lengths else float("nan"),
        "length_max": float(max(lengths)) if lengths else float("nan"),
    }
