"""The one configuration of a training run: its fields; `flags.py` reads them from YAML and flags.

Names are those that slime's users know. A YAML file gives fields by name, a flag overrides it:
`--rollout-batch-size 32` is `rollout_batch_size: 32`. Unknown names are refused, and `checks.py` refuses what does
not fit together.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from trainer_bridge.loss_settings import Algorithm, Correction, LossSettings, Proximal
from trainer_bridge.trainer import TrainerSettings

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field."""


class Config(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Everything that decides what a run does. Lengths are in tokens, times in seconds."""

    # The run
    hf_checkpoint: str
    """Hugging Face folder that training starts from, and whose tokenizer is used."""
    run: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,100}\Z")] = "train"
    """First part of the run's name at the engine; nothing crosses from one run to another."""
    save: str = "out/train"
    """Folder of this run: checkpoints, events, steps.jsonl."""
    num_rollout: Count = 100
    """Steps: rounds of training."""
    seed: Natural = 0
    """Of the data's order and the trainer."""
    save_interval: Count = 1
    """Steps between checkpoints; a round is acknowledged when its checkpoint is durable."""
    keep_checkpoints: Count = 2
    """How many checkpoints stay; older ones are deleted."""
    ray: bool = False
    """Trainer ranks and servers are Ray actors, on one machine or several; without it they are plain processes."""
    ray_address: str | None = None
    """Of a Ray cluster that runs already, as `ray.init` takes it; RAY_ADDRESS if not given, else one is started."""

    # Data
    prompt_data: str
    """JSONL, parquet or a dataset folder."""
    input_key: str = "input"
    """Column of the prompt: text, messages or token ids."""
    label_key: str | None = "label"
    """Column of the answer that the reward is given."""
    metadata_key: str | None = None
    """Column that is passed to the reward as it is."""
    apply_chat_template: bool = False
    """A text prompt becomes one user message."""
    rollout_shuffle: bool = False
    """A new order in every epoch."""

    # Rounds
    rollout_batch_size: Count = 32
    """The quota: groups (or samples, by `quota_unit`) that end a round."""
    over_sampling_batch_size: Count | None = None
    """Prompts that lie in the engine at a round's start, carried ones included; twice the quota if not given."""
    n_samples_per_prompt: Count = 8
    """Samples of a group."""
    partial_rollout: bool = True
    """Whether unfinished samples are kept for the next round; without it a round waits for all that it started."""
    max_staleness: Natural = 5
    """A group as stale as this must finish in the round."""
    kv: Literal["keep", "recompute", "auto"] = "keep"
    """What a resumed sample continues on after a push."""
    quota_unit: Literal["group", "sample"] = "group"
    """What the quota counts."""
    after_quota: Literal["suspend", "continue"] = "suspend"
    """Whether the engine generates ahead while the trainer works."""
    quota_mode: Literal["first", "cohort"] = "first"
    """What must be in before a round may end (S3)."""
    cohort_rounds: Count = 1
    """With `cohort`: what first ran so many rounds ago is in first."""
    rollout_concurrency: Count | None = None
    """At most so many samples of this run at once."""
    strict_on_policy: bool = False
    """Every token is drawn by the policy that is trained: staleness bound 0 and one update per round."""
    on_end: Literal["drain", "drop"] = "drain"
    """What happens to partials after the last step: a last round trains on them, or they are dropped."""

    # Sampling
    rollout_max_response_len: Count = 1024
    """Most tokens of a sample, over all rounds that it takes."""
    rollout_temperature: Positive = 1.0
    """Trainer logits are divided by it too."""
    rollout_top_p: Fraction = 1.0
    """Refused below 1 unless `allow_modified_sampling`."""
    rollout_top_k: int = -1
    """Refused unless -1, or `allow_modified_sampling`."""
    rollout_stop: list[str] = []
    """Strings that end a sample."""
    rollout_stop_token_ids: list[int] = []
    """Tokens that end a sample, besides EOS."""
    rollout_seed: int = 0
    """With a prompt's id and the sample's index it decides every draw."""
    sampling_params: dict[str, Any] = {}
    """More of SGLang's sampling parameters: penalties and grammars need `allow_modified_sampling`."""
    allow_modified_sampling: bool = False
    """Train although tokens were drawn from another distribution than their logprobs are of: ratios are approximate."""

    # Rewards
    reward: str = "trainer_bridge.rewards:math_answer"
    """`module:function` or `file.py:function`: (sample, prompt) -> float."""
    group_reward: str | None = None
    """Instead: (samples, prompt) -> a float for each."""
    reward_workers: Count = 2
    """Processes that compute rewards."""
    reward_timeout: Positive = 30.0
    """Seconds for one call; tried twice, then the sample is masked."""

    # Loss
    advantage_estimator: Algorithm = "grpo"
    """The algorithm."""
    eps_clip: NotNegative | None = None
    """Clip below; the algorithm's own if not given."""
    eps_clip_high: NotNegative | None = None
    """Clip above; `eps_clip` if that is given, else the algorithm's own."""
    loss_mean: Literal["response", "token"] | None = None
    """Over what the loss is a mean; the algorithm's own if not given."""
    correction: Correction = "none"
    """For tokens that an older policy drew (`corrections.py`)."""
    proximal: Proximal = "behaviour"
    """Where the proximal policy's logprobs come from; `engine` takes its recompute's where there is one."""
    tis_clip: NotNegative = 2.0
    """Upper bound of the importance weight."""
    tis_clip_low: NotNegative = 0.0
    """Lower bound of it."""
    icepop_low: NotNegative = 0.5
    """IcePop masks tokens whose weight is below."""
    icepop_high: NotNegative = 5.0
    """Or above."""
    seq_mask_low: NotNegative = 0.999
    """`seq_mask` masks responses whose mean weight is below."""
    seq_mask_high: NotNegative = 1.002
    """Or above."""
    kl_loss_coef: NotNegative = 0.0
    """Weight of the KL to the policy at the start; 0: no reference model."""
    normalize_advantages: bool = True
    """Divide a group's advantages by their standard deviation."""
    dynamic_sampling: bool = False
    """Groups without variance are rejected while the round goes on (DAPO)."""
    overlong_buffer_len: Natural = 0
    """DAPO's soft punishment of the last so many tokens before the bound; 0: none."""

    # Training
    global_batch_size: Count | None = None
    """Samples per optimiser step; all of a round if not given."""
    max_tokens_per_gpu: Count = 8192
    """Most tokens of a micro-batch, prompts included; a longer response stands by itself."""
    lr: Positive = 1e-6
    """Learning rate; constant after the warm-up."""
    lr_warmup_iters: Natural = 0
    """Steps over which the learning rate rises to `lr`."""
    weight_decay: NotNegative = 0.0
    """AdamW's."""
    adam_beta1: NotNegative = 0.9
    """AdamW's."""
    adam_beta2: NotNegative = 0.98
    """AdamW's."""
    clip_grad: Positive = 1.0
    """Norm that gradients are clipped to."""
    tensor_model_parallel_size: Count = 1
    """Ranks that share one copy of the model."""
    trainer_processes: Count = 1
    """Ranks in all; a multiple of the above, the rest is data parallel."""
    trainer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a device."""
    train_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the trainer's weights."""
    colocate: bool = False
    """Engine and trainer share the GPU: the engine's memory is released while the trainer works."""
    offload_trainer: Literal["auto"] | bool = "auto"
    """Colocated: the trainer's memory goes to the host while the engine generates; `auto`: on a GPU."""

    # Engine
    server: str | list[str] | None = None
    """URL of a running server, or several; without it they are started."""
    engines: Count = 1
    """How many servers are started."""
    server_gpus: Count = 1
    """GPUs of each, if several are started on one machine: the next one's begin behind them. What each asks Ray for."""
    server_flags: list[str] = []
    """More flags for the server that is started."""
    server_journal: bool = True
    """The server that is started keeps a journal in the run's folder: its death costs no sample."""
    server_start_timeout: Positive = 900.0
    """Seconds until it must serve; so long a lost server that was given is waited for."""
    api_key: str | None = None
    """The server's key."""
    push: Literal["distributed", "tensor", "disk"] = "distributed"
    """How weights travel."""

    # Evaluation
    eval_interval: Count | None = None
    """Steps between evaluations; one before the first step too."""
    eval_prompt_data: str | None = None
    """Held-out prompts."""
    n_samples_per_eval_prompt: Count = 1
    """Samples of each."""
    eval_temperature: NotNegative = 0.0
    """0: greedy."""
    eval_top_p: Fraction = 1.0
    """Evaluation may cut the tail."""
    eval_max_response_len: Count | None = None
    """`rollout_max_response_len` if not given."""

    @property
    def pool(self) -> int:
        """Prompts that lie in the engine at a round's start."""
        return self.over_sampling_batch_size or 2 * self.rollout_batch_size

    @property
    def servers(self) -> list[str]:
        """URLs of running servers; empty where they are started here."""
        return [self.server] if isinstance(self.server, str) else self.server or []

    @property
    def staleness_bound(self) -> int:
        """Without partial rollouts, and strictly on-policy, no token may be older than the trainer's policy."""
        return self.max_staleness if self.partial_rollout and not self.strict_on_policy else 0

    @property
    def offloads(self) -> bool:
        """Whether the trainer is told to make room for the engine; with `auto` it decides by its device."""
        return self.colocate and self.offload_trainer is not False

    @property
    def loss(self) -> LossSettings:
        """What the loss needs of this; raises ValueError for what does not fit together."""
        return LossSettings(
            algorithm=self.advantage_estimator,
            eps_clip=self.eps_clip,
            eps_clip_high=self.eps_clip_high,
            mean=self.loss_mean,
            correction=self.correction,
            proximal=self.proximal,
            tis_clip=self.tis_clip,
            tis_clip_low=self.tis_clip_low,
            icepop_low=self.icepop_low,
            icepop_high=self.icepop_high,
            seq_mask_low=self.seq_mask_low,
            seq_mask_high=self.seq_mask_high,
        )

    @property
    def trainer(self) -> TrainerSettings:
        """What the trainer needs of this; raises ValueError for what does not fit together."""
        return TrainerSettings(
            hf_checkpoint=Path(self.hf_checkpoint),
            dtype=self.train_dtype,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            world_size=self.trainer_processes,
            device=self.trainer_device,
            lr=self.lr,
            lr_warmup_iters=self.lr_warmup_iters,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            clip_grad=self.clip_grad,
            seed=self.seed,
            offload=self.offload_trainer,
        )

    @property
    def rollout_params(self) -> dict[str, Any]:
        """Sampling parameters of a training round, by SGLang's names."""
        own: dict[str, Any] = {
            "temperature": self.rollout_temperature,
            "max_new_tokens": self.rollout_max_response_len,
            "sampling_seed": self.rollout_seed,
        }
        if self.rollout_top_p < 1:
            own["top_p"] = self.rollout_top_p
        if self.rollout_top_k != -1:
            own["top_k"] = self.rollout_top_k
        if self.rollout_stop:
            own["stop"] = self.rollout_stop
        if self.rollout_stop_token_ids:
            own["stop_token_ids"] = self.rollout_stop_token_ids
        return own | self.sampling_params

    def as_yaml(self) -> str:
        """All fields, as they would be written in a file; the key is not shown."""
        fields = msgspec.to_builtins(self)
        fields["api_key"] = fields["api_key"] and "(given)"
        return yaml.safe_dump(fields, sort_keys=False)
