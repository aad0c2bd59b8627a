"""What happens to functions, workflows and tenants that ask for more than can be answered?"""
