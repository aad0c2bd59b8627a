"""What does a call through the whole stack cost, beside Ray Serve and LitServe?"""
