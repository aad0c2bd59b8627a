"""What happens to a function that is called more often than it can answer?"""
