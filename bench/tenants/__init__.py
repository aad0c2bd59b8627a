"""What does a loud tenant do to quiet ones, live?"""
