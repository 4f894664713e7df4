"""What is made of results for people to read: tables and figures."""
