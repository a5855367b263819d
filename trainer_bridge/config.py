"""The configuration of a training run.

Field names follow slime's. A YAML file gives fields by name, and a flag overrides it: `--rollout-batch-size 32` is
`rollout_batch_size: 32`. `args.py` reads both, `validate.py` rejects fields that contradict each other. The fields of
`LossSettings` are written at the same level as all others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import yaml
from msgspec import Meta

from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.trainer import TrainerSettings, TransportName

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class ConfigError(ValueError):
    """An invalid configuration; the message names the field."""


class Config(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings of a run. Lengths are in tokens, times in seconds."""

    # The run
    hf_checkpoint: str
    """Hugging Face folder with the initial weights and the tokenizer."""
    run: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,100}\Z")] = "train"
    """First part of the run's name at the engine. Runs share nothing."""
    save: str = "out/train"
    """Folder of this run: checkpoints, events, steps.jsonl."""
    num_rollout: Count = 100
    """Number of training steps."""
    seed: Natural = 0
    """Seed of the data order and the trainer."""
    save_interval: Count = 1
    """Steps between checkpoints. Rounds are acknowledged when the checkpoint that contains them is durable."""
    keep_checkpoints: Count = 2
    """How many checkpoints are kept."""
    ray: bool = False
    """Run trainer ranks and servers as Ray actors, on one machine or several, instead of plain processes."""
    ray_address: str | None = None
    """Address of a running Ray cluster, as for `ray.init`. Default: RAY_ADDRESS, else a local Ray is started."""

    # Data
    prompt_data: str
    """JSONL, parquet or a dataset folder."""
    input_key: str = "input"
    """Column of the prompt: text, messages or token ids."""
    label_key: str | None = "label"
    """Column that is passed to the reward as the label."""
    metadata_key: str | None = None
    """Column that is passed to the reward unchanged."""
    apply_chat_template: bool = False
    """Wrap a text prompt in one user message."""
    rollout_shuffle: bool = False
    """Shuffle the prompts in every epoch."""

    # Rounds
    rollout_batch_size: Count = 32
    """The quota: groups (or samples, by `quota_unit`) that end a round."""
    over_sampling_batch_size: Count | None = None
    """Prompts in the engine at the start of a round, carried ones included. Default: twice the quota. Responses with a
    long tail need more, or slots stay empty before the quota is met (docs/rounds.md)."""
    n_samples_per_prompt: Count = 8
    """Samples of a group."""
    partial_rollout: bool = True
    """Carry unfinished samples over to the next round. Without it a round waits for every sample that it started."""
    max_staleness: Natural = 5
    """A group of this staleness must finish in the round."""
    kv: Literal["keep", "recompute", "auto"] = "keep"
    """What happens to the KV cache of a sample that resumes after a push."""
    quota_unit: Literal["group", "sample"] = "group"
    """What the quota counts."""
    after_quota: Literal["suspend", "continue"] = "suspend"
    """Whether the engine continues to generate while the trainer works."""
    quota_mode: Literal["first", "cohort"] = "first"
    """Whether the first groups to finish end the round, or a cohort must be complete too."""
    cohort_rounds: Count = 1
    """With `cohort`: groups that first ran this many rounds ago must be complete."""
    rollout_concurrency: Count | None = None
    """Limit of samples of this run that are generated at the same time, per engine."""
    strict_on_policy: bool = False
    """Train only on tokens drawn by the current policy: staleness bound 0 and one update per round."""
    on_end: Literal["drain", "drop"] = "drain"
    """What happens to partials after the last step: one more round finishes and trains on them, or they are dropped."""

    # Sampling
    rollout_max_response_len: Count = 1024
    """Maximum length of a response, over all rounds that it takes. With `agent`: of each turn."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    rollout_top_p: Fraction = 1.0
    """Must be 1 unless `allow_modified_sampling`."""
    rollout_top_k: int = -1
    """Must be -1 unless `allow_modified_sampling`."""
    rollout_stop: list[str] = []
    """Strings that end a sample."""
    rollout_stop_token_ids: list[int] = []
    """Tokens that end a sample, besides EOS."""
    rollout_seed: int = 0
    """Seed of the sampling noise, together with prompt id and sample index."""
    sampling_params: dict[str, Any] = {}
    """Further sampling parameters of SGLang, without those that have a field. Penalties and grammars need
    `allow_modified_sampling`. With an agent, those that SGLang's chat completions have."""
    allow_modified_sampling: bool = False
    """Allow sampling parameters that change the distribution behind the logprobs, so that ratios are approximate."""

    # Rewards
    reward: str = "trainer_bridge.rewards:math_answer"
    """`module:function` or `file.py:function`: (sample, prompt) -> float."""
    group_reward: str | None = None
    """Replaces `reward`: (samples, prompt) -> one float per sample."""
    reward_workers: Count = 2
    """Processes that compute rewards."""
    reward_timeout: Positive = 30.0
    """Timeout of one call. After two failed attempts the sample is masked."""

    # Agents
    agent: str | None = None
    """`module:function` or `file.py:function`: async (task, client) -> reward, run for each sample in place of a single
    response. `client` is an `openai.AsyncOpenAI`; `reward` and `group_reward` are not used."""
    agent_workers: Count = 2
    """Processes that run agents, many at the same time in the event loop of each."""
    agent_timeout: Positive = 600.0
    """Limit of one trajectory. Time between rounds does not count."""

    # Loss
    loss: LossSettings = LossSettings()
    """Algorithm, clip ranges and off-policy correction."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of the KL to the initial policy; only 0 is supported."""
    normalize_advantages: bool = True
    """Divide the advantages of a group by their standard deviation; `reinforce` and `ppo` have none."""
    dynamic_sampling: bool = False
    """Reject groups whose rewards are all equal while the round is open (DAPO)."""
    overlong_buffer_len: Natural = 0
    """Length of DAPO's soft penalty before the maximum length; 0: none."""

    # Training
    global_batch_size: Count | None = None
    """Samples (with `agent`: trajectories) per optimiser step. Default: all samples of the round."""
    max_tokens_per_gpu: Count = 8192
    """Maximum tokens of a micro-batch, prompts included. A longer sample gets a micro-batch of its own."""
    recompute_granularity: Literal["full"] | None = None
    """`full`: keep only the inputs of each layer for the backward pass and compute the rest again, to save memory."""
    lr: Positive = 1e-6
    """Learning rate; constant after the warm-up."""
    lr_warmup_iters: Natural = 0
    """Steps over which the learning rate rises to `lr`."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW."""
    adam_beta1: NonNegative = 0.9
    """β₁ of AdamW."""
    adam_beta2: NonNegative = 0.98
    """β₂ of AdamW."""
    clip_grad: Positive = 1.0
    """Gradient norm limit."""
    tensor_model_parallel_size: Count = 1
    """Tensor-parallel size of the trainer."""
    trainer_processes: Count = 1
    """Total number of trainer ranks, a multiple of the tensor-parallel size; the quotient is data parallel."""
    trainer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if available."""
    train_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the trainer's weights."""
    colocate: bool = False
    """Engine and trainer share a GPU: the engine releases its memory while the trainer works."""
    offload_trainer: Literal["auto"] | bool = "auto"
    """With `colocate`: move the trainer's memory to the host while the engine generates. `auto`: on GPUs."""

    # Engine
    server: str | list[str] | None = None
    """URL of a running server, or several. Default: start servers."""
    engines: Count = 1
    """Number of servers to start."""
    server_gpus: Count = 1
    """GPUs per started server: consecutive ones on one machine, or the number requested from Ray. `--tp-size` in
    `server_flags` makes the server use them."""
    server_flags: list[str] = []
    """Further flags for started servers."""
    server_journal: bool = True
    """Keep the journal of a started server in the run's folder, so that its death loses no sample."""
    server_start_timeout: Positive = 900.0
    """Time for a server to become ready, or for a lost external server to come back."""
    api_key: str | None = None
    """API key of the servers."""
    push: TransportName = "auto"
    """How weights are transferred. `auto`: `tensor` where trainer and engine share a GPU, because NCCL refuses two
    ranks on one; otherwise `distributed`."""

    # Evaluation
    eval_interval: Count | None = None
    """Steps between evaluations; there is one before the first step too."""
    eval_prompt_data: str | None = None
    """Held-out prompts."""
    n_samples_per_eval_prompt: Count = 1
    """Samples per held-out prompt."""
    eval_temperature: NonNegative = 0.0
    """0: greedy."""
    eval_top_p: Fraction = 1.0
    """Top-p of evaluations."""
    eval_max_response_len: Count | None = None
    """Default: `rollout_max_response_len`."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The configuration with these fields, those of `LossSettings` among them. Raises: msgspec.ValidationError."""
        names = {field.encode_name for field in msgspec.structs.fields(LossSettings)}
        loss = {name: value for name, value in fields.items() if name in names}
        others = {name: value for name, value in fields.items() if name not in names}
        if "loss" in others:
            raise msgspec.ValidationError("Object contains unknown field `loss`")
        return msgspec.convert({**others, "loss": msgspec.convert(loss, LossSettings)}, cls)

    def as_yaml(self) -> str:
        """All fields as a YAML file, with the API key redacted."""
        fields: dict[str, Any] = {}
        for name, value in msgspec.to_builtins(self).items():
            fields |= value if name == "loss" else {name: value}
        fields["api_key"] = fields["api_key"] and "(given)"
        return yaml.safe_dump(fields, sort_keys=False)

    @property
    def pool_size(self) -> int:
        """Prompts in the engine at the start of a round."""
        return self.over_sampling_batch_size or 2 * self.rollout_batch_size

    @property
    def servers(self) -> list[str]:
        """URLs of external servers; empty if servers are started."""
        return [self.server] if isinstance(self.server, str) else self.server or []

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`, or 0 without partial rollouts and under `strict_on_policy`."""
        return self.max_staleness if self.partial_rollout and not self.strict_on_policy else 0

    @property
    def offloads(self) -> bool:
        """Whether the loop asks the trainer to offload; with `auto` the trainer decides by its device."""
        return self.colocate and self.offload_trainer is not False

    @property
    def transport(self) -> TransportName:
        """How weights are transferred; `auto` is decided by the GPUs that the engines report."""
        return "tensor" if self.push == "auto" and self.colocate else self.push

    def engine_gpus(self, number: int, trainer_on_gpus: bool) -> range:
        """The visible GPUs of a server that the run starts: those of a colocated trainer, or those behind it."""
        behind = self.trainer_processes if trainer_on_gpus and not self.colocate else 0
        first = behind + number * self.server_gpus
        return range(first, first + self.server_gpus)

    @property
    def trainer(self) -> TrainerSettings:
        """The trainer's settings. Raises: ValueError: they contradict each other."""
        return TrainerSettings(
            hf_checkpoint=Path(self.hf_checkpoint),
            dtype=self.train_dtype,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            world_size=self.trainer_processes,
            recompute_granularity=self.recompute_granularity,
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
