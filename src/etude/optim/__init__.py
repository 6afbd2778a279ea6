"""Optimizers on their fastest kernel, schedules as functions of the step, clipping."""
