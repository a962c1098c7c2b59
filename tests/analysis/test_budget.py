"""Budgets on tiny random models."""
