"""Slots, queues, stages and tenants."""
