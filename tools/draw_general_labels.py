"""Headings of forms, receipts and tables, and the questions about pictures, of `calib/general`, in six languages."""

from __future__ import annotations

LABEL_KEYS = [
    "invoice",
    "form",
    "date",
    "name",
    "address",
    "phone",
    "email",
    "total",
    "tax",
    "cash",
    "item",
    "quantity",
    "price",
    "sum",
    "number",
    "signature",
    "department",
    "position",
    "born",
    "city",
    "month",
    "region",
    "sales",
    "costs",
    "profit",
    "share",
    "year",
    "notes",
    "yes",
    "no",
    "page",
    "customer",
]

LABELS = {
    "en": "Invoice|Application form|Date|Name|Address|Phone|E-mail|Total|Tax|Cash|Item|Qty|Price|Amount|Number|Signature|Department|Position|"
    "Date of birth|City|Month|Region|Sales|Costs|Profit|Share|Year|Notes|Yes|No|Page|Customer",
    "de": "Rechnung|Antrag|Datum|Name|Anschrift|Telefon|E-Mail|Summe|MwSt.|Bar|Artikel|Menge|Preis|Betrag|Nummer|Unterschrift|Abteilung|Stelle|"
    "Geburtsdatum|Ort|Monat|Gebiet|Umsatz|Kosten|Gewinn|Anteil|Jahr|Bemerkungen|Ja|Nein|Seite|Kunde",
    "fr": "Facture|Formulaire|Date|Nom|Adresse|Téléphone|Courriel|Total|TVA|Espèces|Article|Qté|Prix|Montant|Numéro|Signature|Service|Poste|"
    "Date de naissance|Ville|Mois|Région|Ventes|Coûts|Bénéfice|Part|Année|Remarques|Oui|Non|Page|Client",
    "zh": (
        "发票|申请表|日期|姓名|地址|电话|电子邮箱|合计|税额|现金|品名|数量|单价|金额|编号|签名|部门|职位|"
        "出生日期|城市|月份|地区|销售额|成本|利润|占比|年份|备注|是|否|页|客户"
    ),
    "ar": "فاتورة|نموذج طلب|التاريخ|الاسم|العنوان|الهاتف|البريد|المجموع|الضريبة|نقدا|الصنف|الكمية|السعر|المبلغ|الرقم|التوقيع|القسم|الوظيفة|"
    "تاريخ الميلاد|المدينة|الشهر|المنطقة|المبيعات|التكاليف|الربح|الحصة|السنة|ملاحظات|نعم|لا|صفحة|العميل",
    "ru": "Счёт|Заявление|Дата|Имя|Адрес|Телефон|Почта|Итого|НДС|Наличные|Товар|Кол-во|Цена|Сумма|Номер|Подпись|Отдел|Должность|"
    "Дата рождения|Город|Месяц|Регион|Продажи|Расходы|Прибыль|Доля|Год|Примечания|Да|Нет|Страница|Заказчик",
}

ASK = {
    "total": {
        "en": "What is the total?",
        "de": "Wie hoch ist die Summe?",
        "fr": "Quel est le total ?",
        "zh": "合计是多少?",
        "ar": "كم المجموع؟",
        "ru": "Какова итоговая сумма?",
    },
    "date": {
        "en": "What date is on the document?",
        "de": "Welches Datum steht auf dem Dokument?",
        "fr": "Quelle est la date du document ?",
        "zh": "文件上的日期是什么?",
        "ar": "ما التاريخ المكتوب في الوثيقة؟",
        "ru": "Какая дата указана в документе?",
    },
    "number": {
        "en": "What is the document number?",
        "de": "Wie lautet die Nummer?",
        "fr": "Quel est le numéro ?",
        "zh": "编号是多少?",
        "ar": "ما الرقم؟",
        "ru": "Какой номер документа?",
    },
    "name": {
        "en": "Whose name is given?",
        "de": "Welcher Name ist angegeben?",
        "fr": "Quel nom est indiqué ?",
        "zh": "上面写的姓名是什么?",
        "ar": "ما الاسم المكتوب؟",
        "ru": "Какое имя указано?",
    },
    "title": {
        "en": "What is the title?",
        "de": "Wie lautet der Titel?",
        "fr": "Quel est le titre ?",
        "zh": "标题是什么?",
        "ar": "ما العنوان الرئيسي؟",
        "ru": "Как называется документ?",
    },
    "read": {
        "en": "Read the text.",
        "de": "Lies den Text vor.",
        "fr": "Lis le texte.",
        "zh": "请读出文字。",
        "ar": "اقرأ النص.",
        "ru": "Прочитай текст.",
    },
    "firm": {
        "en": "Which company issued this?",
        "de": "Welche Firma hat das ausgestellt?",
        "fr": "Quelle société a émis ce document ?",
        "zh": "由哪家单位开具?",
        "ar": "ما اسم الجهة المصدرة؟",
        "ru": "Какая организация выдала документ?",
    },
    "price": {
        "en": "What does “{}” cost?",
        "de": "Was kostet „{}“?",
        "fr": "Combien coûte « {} » ?",
        "zh": "“{}”的价格是多少?",
        "ar": "ما سعر «{}»؟",
        "ru": "Сколько стоит «{}»?",
    },
    "time": {
        "en": "What time is in the row of {}?",
        "de": "Welche Uhrzeit steht bei {}?",
        "fr": "Quelle heure est indiquée pour {} ?",
        "zh": "{}这一行的时间是几点?",
        "ar": "ما الوقت في سطر {}؟",
        "ru": "Какое время указано в строке «{}»?",
    },
    "highest": {
        "en": "Which {} has the highest value?",
        "de": "Welcher Eintrag ({}) hat den höchsten Wert?",
        "fr": "Quelle entrée ({}) a la valeur la plus haute ?",
        "zh": "哪个{}的数值最高?",
        "ar": "أين أعلى قيمة ({})؟",
        "ru": "У какого значения ({}) наибольший показатель?",
    },
    "value": {
        "en": "What is the value of {} for {}?",
        "de": "Wie groß ist {} bei {}?",
        "fr": "Quelle est la valeur de {} pour {} ?",
        "zh": "{}({})是多少?",
        "ar": "كم قيمة {} في {}؟",
        "ru": "Какое значение: {}, {}?",
    },
}


def label(lang: str, key: str) -> str:
    """The heading `key` of LABEL_KEYS in that language."""
    return LABELS[lang].split("|")[LABEL_KEYS.index(key)]
