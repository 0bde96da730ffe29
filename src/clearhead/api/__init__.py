"""What a user calls, a file for each verb."""
