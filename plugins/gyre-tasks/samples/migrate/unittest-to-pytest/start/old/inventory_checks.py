import unittest

from inventory import Inventory, OutOfStockError


class InventoryTest(unittest.TestCase):
    def setUp(self):
        self.stock = Inventory()
        self.stock.add("bolt", 3)

    def test_add_sums_up(self):
        self.stock.add("bolt", 2)
        self.assertEqual(self.stock.amount("bolt"), 5)

    def test_add_refuses_what_is_not_positive(self):
        for amount in (0, -1):
            with self.subTest(amount=amount), self.assertRaises(ValueError):
                self.stock.add("nut", amount)

    def test_take(self):
        self.stock.take("bolt")
        self.assertEqual(self.stock.amount("bolt"), 2)

    def test_take_too_much(self):
        with self.assertRaisesRegex(OutOfStockError, "bolt"):
            self.stock.take("bolt", 4)
        self.assertEqual(self.stock.amount("bolt"), 3)

    def test_what_is_used_up_is_gone(self):
        self.stock.take("bolt", 3)
        self.assertNotIn("bolt", self.stock.names())
        self.assertEqual(self.stock.amount("bolt"), 0)

    def test_names_are_sorted(self):
        self.stock.add("axle")
        self.stock.add("cog")
        self.assertListEqual(self.stock.names(), ["axle", "bolt", "cog"])

    def test_merge(self):
        other = Inventory()
        other.add("bolt", 1)
        other.add("nut", 4)
        self.stock.merge(other)
        self.assertEqual((self.stock.amount("bolt"), self.stock.amount("nut")), (4, 4))
        self.assertEqual(other.amount("nut"), 4)


if __name__ == "__main__":
    unittest.main()
