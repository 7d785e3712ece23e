"""Sessions: their rows, who may write to them, and the base of their handles."""

from .access import Place
from .handle import SessionHandle, SessionPart
from .identity import Identity, IdentityOps
from .noun import SessionsNoun

__all__ = ["Identity", "IdentityOps", "Place", "SessionHandle", "SessionPart", "SessionsNoun"]
