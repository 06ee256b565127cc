"""Published serving runs beside what a profile predicts of them: closed loops of clients."""
