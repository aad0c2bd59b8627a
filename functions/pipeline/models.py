"""Two small convolutional networks: one finds where to look, one says what is there."""

from torch import nn


def _step(inside, outside, stride):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class Detector(nn.Module):
    """For every field of a grid: how sure, and the box around its centre (0 to 1)."""

    def __init__(self):
        super().__init__()
        sizes = [(3, 16), (16, 32), (32, 64), (64, 64)]
        self.body = nn.Sequential(*(_step(inside, outside, 2) for inside, outside in sizes))
        self.head = nn.Conv2d(64, 5, 1)

    def forward(self, pictures):
        """Batch x 5 x rows x columns."""
        return self.head(self.body(pictures)).sigmoid()


class Classifier(nn.Module):
    """Scores of ten classes for a crop."""

    def __init__(self, classes=10):
        super().__init__()
        sizes = [(3, 32, 2), (32, 64, 2), (64, 128, 2), (128, 128, 1)]
        self.body = nn.Sequential(*(_step(*size) for size in sizes))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(128, classes)

    def forward(self, crops):
        """Batch x classes."""
        return self.head(self.pool(self.body(crops)).flatten(1))
