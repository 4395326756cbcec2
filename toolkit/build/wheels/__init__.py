"""Wheels on their way: from a folder on the control machine to a store on each host, over SSH."""
