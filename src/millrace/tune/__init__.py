"""Chooses build settings from measurements: precision by accuracy loss, and sizes by recorded traffic."""
