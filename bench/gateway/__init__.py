"""What does a call through the whole stack cost, beside LitServe, Ray Serve and BentoML?"""
