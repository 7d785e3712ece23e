"""Peers: sessions ask other agents, hold nothing while they wait, and resume once, anywhere."""

from .asks import Ask
from .handle import SessionPeers, StorePeers
from .noun import PeersNoun
from .records import (
    Answer,
    Answered,
    Artifact,
    Decision,
    Parked,
    Pause,
    PeerCall,
    PeerRequest,
    Resumption,
)

__all__ = [
    "Answer",
    "Answered",
    "Artifact",
    "Ask",
    "Decision",
    "Parked",
    "Pause",
    "PeerCall",
    "PeerRequest",
    "PeersNoun",
    "Resumption",
    "SessionPeers",
    "StorePeers",
]
