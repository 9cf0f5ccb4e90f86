"""Proving a rung on a group of workers, whoever they are: the network, then every rank, then small worlds to locate a fault."""
