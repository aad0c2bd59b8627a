"""Does anything grow while a stack serves, changes and forgets for an hour?"""
