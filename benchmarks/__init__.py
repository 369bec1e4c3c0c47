"""Measuring Locum: load, a receiver that swallows, and the yardstick that makes machines comparable."""
