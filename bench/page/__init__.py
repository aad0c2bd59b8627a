"""What does the web page cost the gateway, the scheduler and the browser?"""
