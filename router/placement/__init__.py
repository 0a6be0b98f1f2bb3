"""Chooses the workers of a request.

placer snapshots the cluster from its worker_state, policy chooses by the scorer's predictions, and
the cost_model learns from each attempt with core/online_fit.
"""
