"""The composition root: the chat server. The only package that knows both `sessions` and `kvstore`."""
