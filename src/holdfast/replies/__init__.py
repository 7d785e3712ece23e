"""Replies: the outcomes of requests that may be sent twice."""

from .noun import RepliesNoun
from .requests import Reply, lane_reply, remembered, settle_lane

__all__ = ["RepliesNoun", "Reply", "lane_reply", "remembered", "settle_lane"]
