CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, price TEXT NOT NULL);
INSERT INTO customers (name) VALUES ('Ada Lovelace'), ('Jean Luc Picard'), ('Plato');
INSERT INTO orders (customer, price) VALUES (1, '19.99'), (2, '0.29'), (3, '5');
PRAGMA user_version = 1;
