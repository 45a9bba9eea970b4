"""phsa: sparse attention for large language models.

``phsa.ops`` holds the PyTorch operators, ``phsa.punctuation`` the flag tables, ``phsa.hf`` the Hugging Face
integration and ``phsa.settings`` the settings they share. Importing ``phsa`` alone needs neither PyTorch nor
transformers.
"""

from ._library import LibraryError, set_target, target, targets
from .settings import ModelSettings, Settings

__version__ = "0.1.0"
__all__ = ["LibraryError", "ModelSettings", "Settings", "__version__", "set_target", "target", "targets"]
