"""Models and weights from elsewhere, and back."""

from mha_haiku.interop.observed_model import observed_model
from mha_haiku.interop.observing import Observed, observe

__all__ = ["Observed", "observe", "observed_model"]
