"""slime's rollout function over batch-quota rounds (docs/integrations/slime.md):

    --rollout-function-path sglang_april.integrations.slime.generate_rollout

Facts about slime's interface: `slime/rollout/sglang_rollout.py`, `slime/rollout/data_source.py` and
`slime/utils/types.py` of github.com/THUDM/slime, commit 624b824.
"""

from argparse import Namespace
from functools import cache
from typing import Any

from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts


@cache
def rollouts() -> Rollouts:
    """One per process: it keeps the connections to the engines."""
    return Rollouts(Framework("slime"))


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`RolloutFnTrainOutput` with `rollout_batch_size` groups; evaluation is slime's own.

    Raises:
        ValueError: an argument of slime that a round cannot honour.
        AprilError: an engine refused the round.
    """
    return rollouts().generate_rollout(args, rollout_id, data_source, evaluation)
