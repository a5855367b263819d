"""miles's rollout function over batch-quota rounds, by the form that it shares with slime (docs/integrations/slime.md):

    --rollout-function-path sglang_april.integrations.miles.generate_rollout

Facts about miles's interface: `miles/rollout/inference_rollout/compatibility.py` and `miles/utils/types.py` of the
package miles-rl 0.0.2.
"""

from argparse import Namespace
from functools import cache
from typing import Any

from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts


@cache
def rollouts() -> Rollouts:
    """One per process: it keeps the connections to the engines."""
    return Rollouts(Framework("miles"))


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """As `sglang_april.integrations.slime.generate_rollout`."""
    return rollouts().generate_rollout(args, rollout_id, data_source, evaluation)
