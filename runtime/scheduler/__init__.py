"""Decides what runs in each step: the scheduler, its policies and its batches."""

from .batch import Batch, ScheduledRequest
from .limits import SchedulerLimits
from .policy import POLICIES, SchedulingPolicy, WaitingQueue, get_policy
from .scheduler import Scheduler
from .stats import SchedulerStats

__all__ = [
    "POLICIES",
    "Batch",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerStats",
    "SchedulingPolicy",
    "WaitingQueue",
    "get_policy",
]
