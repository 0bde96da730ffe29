"""What a user calls: a file for each verb, with what it returns, and what verbs share."""
