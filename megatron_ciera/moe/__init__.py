"""Mixture-of-Experts layers that send less: expert placement, migration and the deduplicating dispatcher."""
