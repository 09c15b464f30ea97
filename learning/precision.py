"""What is computed in which dtype, and the loss scale that keeps fp16's gradients in its range."""

from dataclasses import dataclass

import torch

from errors import SettingError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# By trial: from a largest scaled gradient of 0.1 on nothing is lost below, and 1e4 is the end above. With
# gradient norms of about 1, as runs have them, this start is far from both.
FIRST_SCALE, SMALLEST_SCALE = 2.0**14, 1.0
GROWTH_STEPS = 2000  # steps without an overflow after which the scale is doubled


def compute_dtype(precision, device):
    """The dtype that rollouts, frozen weights and the update's autocast have; without CUDA it is float32.

    SettingError for another word, and for fp16 on the CPU, which is nobody's default.
    """
    if precision not in DTYPES:
        raise SettingError("precision", precision, "must be one of " + ", ".join(DTYPES))
    if torch.device(device).type == "cuda":
        return DTYPES[precision]
    if precision == "fp16":
        remedy = "needs a CUDA device, and the CPU computes in float32: leave it out, or say --precision fp32"
        raise SettingError("precision", precision, remedy)
    return torch.float32


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward, so that small gradients are not 0 in fp16
    (https://arxiv.org/abs/1710.03740, section 3.2).

    A power of two: gradients that are divided by it again are those of the plain loss, to the bit. torch's
    GradScaler knows neither of a loss that is not finite nor of what other processes met.
    """

    value: float = FIRST_SCALE
    good_steps: int = 0  # latest steps in a row that did not overflow

    @torch.no_grad()
    def unscale(self, parameters):
        """Divide the gradients, in place."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.value)

    def count_good_step(self):
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = 2 * self.value, 0

    def halve(self):
        """After a step that overflowed; returns False where the scale cannot be the reason any more."""
        self.good_steps = 0
        if self.value <= SMALLEST_SCALE:
            return False
        self.value /= 2
        return True

    def state(self):
        return [self.value, self.good_steps]

    def restore(self, state):
        if state:
            self.value, self.good_steps = state
