"""`gpufaas check`: runs a program and says what ran on the CPU, ended graphs, or was refused."""
