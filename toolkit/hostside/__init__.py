"""The agent: the toolkit at work on a host, told what to do over one SSH channel."""
