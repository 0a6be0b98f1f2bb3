"""Chooses the workers of a request.

placer builds a snapshot of the cluster from each worker_state, policy chooses by the scorer's
predictions, and cost_model learns from each attempt with core/online_fit.
"""
